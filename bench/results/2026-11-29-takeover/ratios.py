import json,sys,collections,statistics as st,random
g=collections.defaultdict(lambda: collections.defaultdict(list))
for f in sys.argv[1:]:
    for r in json.load(open(f)):
        if not r['ok']: print('bad',r['transport'],r['error'],r['cut'])
        g[(r['profile'],r['loss_pct'],r['size'])][r['transport']].append(r['fct_s'])
for k,t in sorted(g.items()):
    m={x:st.median(v) for x,v in t.items()}; a={x:st.mean(v) for x,v in t.items()}
    bm=min(v for x,v in m.items() if x!='hook:auto'); ba=min(v for x,v in a.items() if x!='hook:auto')
    rs=sorted((lambda mm: min(v for x,v in mm.items() if x!='hook:auto')/mm['hook:auto'])({x:st.median(random.choices(v,k=len(v))) for x,v in t.items()}) for _ in range(400))
    print(k,' '.join('%s %.3f/%.3f'%(x,m[x],a[x]) for x in sorted(m)),' ratio med %.3f (%.2f-%.2f) mean %.3f'%(bm/m['hook:auto'],rs[20],rs[379],ba/a['hook:auto']))
